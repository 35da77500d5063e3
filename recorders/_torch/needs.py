"""Every private API of PyTorch that `recorders` uses, by name, each with what is off without it. Checked on torch 2.13.

If nothing is said of one, something public does the same, and takes longer; then nobody is told.

All but those of the compiler are there from torch 2.8 on. `tests/recorders/test_missing_apis.py` takes each away, and
`tests/test_house.py` finds those that are not in here.
"""

from __future__ import annotations

from collections.abc import Mapping

from reducers._torch import declare

_EXACT = ""
_MODES = "while a mode of the user is on (selective checkpointing, a FLOP counter, a default device), nothing is recorded"
_GRAPHS = "nothing is recorded inside compiled graphs"
_BY_THEMSELVES = "hooks outside of a compiled graph may be compiled by themselves, again and again"
_STEPS = "a compiled optimizer.step may be compiled again and again while parameters are recorded"
_RENEWAL = "a net that was compiled before its hooks were on is not compiled again, and may record nothing"
_INSIDE = "optimizer steps inside compiled programs are not recorded"
_SHARED = "blocks of one class share a graph though some have no hooks"
_PAIRS = "DifferenceMonitor and monitors of gradients record nothing inside compiled graphs"

NEEDS: Mapping[str, str] = {
    # Modes and contexts. Those written in C cannot be interrupted while they end.
    "torch._C._InferenceMode": "an exception from outside, such as KeyboardInterrupt, may leave inference mode changed",
    "torch._C._DisableAutocast": "autocast of devices other than the CPU holds for the work of monitors",
    "torch._C._set_grad_enabled": _EXACT,
    "torch._C._is_any_autocast_enabled": "autocast of devices other than the CPU holds for the work of monitors",
    "torch._C._len_torch_dispatch_stack": "modes of dispatch are not found, and stay on",
    "torch._C._len_torch_function_stack": "modes of functions are not found, and stay on",
    "torch._C._pop_torch_dispatch_stack": _MODES,
    "torch._C._pop_torch_function_stack": _MODES,
    "torch._C._push_on_torch_dispatch_stack": _MODES,
    "torch._C._push_on_torch_function_stack": _MODES,
    "torch._C._get_dispatch_mode": _MODES,
    "torch._C._TorchDispatchModeKey": _MODES,
    "torch._C._get_function_stack_at": _MODES,
    "torch.utils._device.DeviceContext": "the default device of the user does not hold for callables of monitors",
    "torch.utils._python_dispatch.TorchDispatchMode": (
        "findings(recorder, example=...) says nothing of attention and of dropout; bisect and repeat raise an error"
    ),
    "torch.utils._python_dispatch._disable_current_modes": "states are not made while fake tensors are",
    # What runs now.
    "torch._C._current_graph_task_id": "two backwards through one graph (retain_graph) are not told apart",
    "torch._C._current_autograd_node": "what checkpoints run again is recorded again",
    "torch._C._functorch.peek_interpreter_stack": _EXACT,
    "torch._C._functorch.maybe_current_level": "what runs inside vmap and grad of torch.func is taken for plain tensors",
    "torch._C._functorch.is_legacy_batchedtensor": "gradients of is_grads_batched=True are taken for plain tensors",
    "torch._C._get_tracing_state": _EXACT,
    # Modules, optimizers, ranks, devices.
    "torch._foreach_copy_": _EXACT,
    "torch._foreach_sub_": _EXACT,
    "torch._foreach_neg_": _EXACT,
    "torch.nn.Module._call_impl": "what a hook keeps for a later hook of the same call is lost if the forward raises",
    "torch.utils.hooks.RemovableHandle.hooks_dict_ref": _EXACT,
    "torch.optim.Optimizer.profile_hook_step": _STEPS,
    "torch.autograd.Variable._execution_engine": "what a compiled backward observes is handed over layer by layer",
    "torch.distributed.ProcessGroup._get_backend": "errors of sync do not say how long ranks waited",
    "torch._C._FunctionBase._input_metadata": "reports call the gradients of all that a compiled graph returns partial",
    "torch.cuda._lazy_call": _EXACT,
    "torch._C._autograd._top_saved_tensors_default_hooks": "observations in graphs on a GPU end CUDA graphs",
    # Compiled programs: asked when Dynamo is imported, or traces.
    "torch._higher_order_ops.effects._register_effectful_op": _GRAPHS,
    "torch._higher_order_ops.effects._EffectType": _GRAPHS,
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": _BY_THEMSELVES,
    "torch._C._dynamo.eval_frame._FrameAction": _BY_THEMSELVES,
    "torch._C._dynamo.eval_frame._FrameExecStrategy": _BY_THEMSELVES,
    "torch._C._dynamo.eval_frame._debug_get_cache_entry_list": _RENEWAL,
    "torch._C._dynamo.eval_frame.reset_code": _RENEWAL,
    "torch._dynamo.convert_frame.input_codes": _RENEWAL,
    "torch._dynamo.convert_frame.compile_lock": _RENEWAL,
    "torch._dynamo.eval_frame._stance": _RENEWAL,
    "torch._dynamo.eval_frame.always_optimize_code_objects": _STEPS,
    "torch._dynamo.graph_break": _INSIDE,
    "torch._dynamo.guards.GuardBuilder": _SHARED,
    "torch._dynamo.guards.GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT": _SHARED,
    "torch._dynamo.callback.callback_handler": "hooks that are not due stay in the modules, which takes longer",
    "torch._dynamo.callback.CallbackTrigger": _EXACT,
    "torch._dynamo.comptime.comptime": _PAIRS,
    "torch._dynamo.comptime.ComptimeContext._i_will_not_complain_if_bc_breaks_InstructionTranslator": _PAIRS,
    "torch._dynamo.symbolic_convert.InstructionTranslator": _INSIDE,
    "torch._inductor.config": "graphs with monitors are compiled anew in each process, not found on disk",
    "torch._dynamo.utils.counters": "reports take any net for one that may be compiled",
    "torch._dynamo.output_graph.OutputGraph.current_tracer": "gradients inside compiled graphs are not recorded",
    "torch.ops.higher_order.tag_activation_checkpoint": "some gradients within checkpoints in compiled graphs are not recorded",
}

declare(NEEDS)
