"""Every private API of PyTorch that this package uses: what eager mode asks is here, what compiled programs ask in `compiler.py`.

`needs.py` says what is off without each. A name that begins with an underscore may go in any release. If one is gone, the package
is imported all the same, what can be done without it is done, and `warn_of_missing` and reports tell what is off.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from itertools import chain, repeat, starmap
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from recorders._torch.needs import NEEDS
from recorders.errors import RecordingWarning
from reducers._torch import MissingInTorchError, cpu_library, dynamo_is_imported, missing, or_else, reach
from reducers.errors import warn_user
from reducers.kernels.precision import has_memory

P = ParamSpec("P")
R = TypeVar("R")

CAPTURES_IN_GRAPHS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)  # whether monitors can record there

_told: set[str] = set()


def warn_of_missing() -> None:
    """Warns of private APIs that this torch was found not to have, unless this was told before."""
    new = [message for message in missing() if message not in _told]
    if new:
        _told.update(new)
        warn_user(f"{'; '.join(new)}. All else is recorded as usual: use the torch that docs/torch.md names", RecordingWarning)


def _task_by_node() -> int:
    node = or_else("torch._C._current_autograd_node", lambda: None)
    return -1 if node() is None else 0


# Contexts written in C: those written in Python can be interrupted while they end, and then leave a mode as it was inside.
NoInference = or_else("torch._C._InferenceMode", torch.inference_mode)
NoAutocast = or_else("torch._C._DisableAutocast", lambda: torch.autocast("cpu", enabled=False))
set_grad_enabled = or_else("torch._C._set_grad_enabled", torch.set_grad_enabled)  # a function; the other is a context, too

_NOTHING = nullcontext()

# Functions that a hook calls every time are bound here, because a global is found faster than an attribute.
graph_task: Callable[[], int] = or_else("torch._C._current_graph_task_id", _task_by_node)  # -1 if no backward runs in this thread
autocast_is_on = or_else("torch._C._is_any_autocast_enabled", lambda: torch.is_autocast_enabled("cpu"))
is_batched: Callable[[torch.Tensor], bool] = or_else("torch._C._functorch.is_legacy_batchedtensor", lambda _: False)
_interpreter = or_else("torch._C._functorch.peek_interpreter_stack", None) or or_else(
    "torch._C._functorch.maybe_current_level", lambda: None
)
_node: Callable[[], Any] = or_else("torch._C._current_autograd_node", lambda: None)
_jit_trace = or_else("torch._C._get_tracing_state", lambda: torch.jit.is_tracing() or None)  # type: ignore[attr-defined,no-untyped-call]
_count_dispatch: Callable[[], int] = or_else("torch._C._len_torch_dispatch_stack", lambda: 0)
_count_function: Callable[[], int] = or_else("torch._C._len_torch_function_stack", lambda: 0)
_pop_dispatch = or_else("torch._C._pop_torch_dispatch_stack", None)
_pop_function = or_else("torch._C._pop_torch_function_stack", None)
_push_dispatch = or_else("torch._C._push_on_torch_dispatch_stack", None)
_push_function = or_else("torch._C._push_on_torch_function_stack", None)
_dispatch_mode = or_else("torch._C._get_dispatch_mode", None)
_dispatch_keys = or_else("torch._C._TorchDispatchModeKey", None)
_function_mode = or_else("torch._C._get_function_stack_at", None)

# Modes of PyTorch itself, below the user's on the stack: while a program is traced, tensors have no meaning without them.
_INTERNAL = () if _dispatch_keys is None else tuple(_dispatch_keys.__members__.values())
_PROXY = None if _dispatch_keys is None else _dispatch_keys.PROXY
MODES_STAY = next((message for message in missing() if NEEDS["torch._C._get_dispatch_mode"] in message), "")
_DEVICE_MODES = or_else("torch.utils._device.DeviceContext", ())

# The code of the function that calls a module, in which is that of the one that calls its hooks; and of the one that calls `step`.
_CALL_CODE: CodeType | None = getattr(or_else("torch.nn.Module._call_impl", None), "__code__", None)
_step = or_else("torch.optim.Optimizer.profile_hook_step", None)
STEP_CODE: CodeType | None = None if _step is None else getattr(_step(lambda: None), "__code__", None)


def without_modes(call: Callable[..., Any], *args: Any) -> Any:
    """Call `call(*args)` without all modes, also those of PyTorch: fake tensors, inference, autocast, gradients, default device."""
    return outside_modes(_run_plainly, call, args)


def plainly(function: Callable[P, R]) -> Callable[P, R]:
    """Makes `function` run without modes, those of PyTorch included: it makes states, outside of a graph or a hook.

    Otherwise they would be inference tensors, which later observations cannot update, or fake ones, or on a default device of the
    user.

    >>> import torch
    >>> with torch.inference_mode():
    ...     plainly(torch.ones)(2).is_inference()
    False
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = without_modes(partial(function, *args, **kwargs))
        return result

    return call


@contextmanager
def _no_modes_or_refused() -> Iterator[None]:
    if _count_dispatch():
        reach("torch.utils._python_dispatch._disable_current_modes")  # raises what is off
    yield


no_modes = or_else("torch.utils._python_dispatch._disable_current_modes", _no_modes_or_refused)


def _run_plainly(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    # Thousands of monitors are made and read by this, most of them while nothing is on, and switching takes longer than the call.
    modes = no_modes() if _count_dispatch() else _NOTHING
    autocast = NoAutocast() if autocast_is_on() else _NOTHING
    device = torch.device("cpu") if _count_function() else _NOTHING  # a default device is a mode that stays
    with modes, NoInference(False), autocast, device:
        set_grad_enabled(False)  # the end of NoInference turns gradients on again
        return call(*args)


def group_timeout(group: Any, device: torch.device) -> float | None:
    """The seconds that collectives of a process group wait for a rank; None if it cannot be told. For errors only."""
    try:
        backend = reach("torch.distributed.ProcessGroup._get_backend")(group, device)
        seconds: float = backend.options._timeout.total_seconds()
    except Exception:
        return None
    return seconds


def is_distributed(module: torch.nn.Module) -> bool:
    """Whether the parameters of a layer, or its inputs and outputs, were spread over ranks by a style of tensor parallelism."""
    return getattr(module, "_distribute_module_applied", False)


def is_fake(tensor: object) -> bool:
    """Whether this is a tensor of `FakeTensorMode` or of functionalisation, which has a shape but no data of its own.

    By the names of classes: to import these takes long, and who has such a tensor has done so.
    """
    return any(kind.__name__ in ("FakeTensor", "FunctionalTensor") for kind in type(tensor).__mro__)


def hooks_ref(handle: Any) -> Callable[[], Any]:
    """A weak reference to the dictionary in which the hook of a handle is, or was."""
    found: Callable[[], Any] | None = getattr(handle, "hooks_dict_ref", None)
    return found or (lambda: handle.__getstate__()[0])  # what PyTorch pickles of a handle


def call_of_module(frame: FrameType) -> FrameType:
    """The frame of the call of a module, in which `frame` called a hook: the same before the forward and after it, or an error."""
    outer = frame.f_back  # PyTorch calls hooks in a function within `_call_impl`, but after an exception in `_call_impl` itself
    within = outer is not None and outer.f_code is _CALL_CODE and frame.f_code in outer.f_code.co_consts
    return outer if within and outer is not None else frame


def hooks_on_forwards(module: nn.Module) -> dict[str, Any]:
    """The dictionaries of the hooks on the forwards of a module, by name."""
    return {kind: getattr(module, kind, {}) for kind in ("_forward_pre_hooks", "_forward_hooks")}


def drop_backward_hooks(net: nn.Module) -> None:
    """Take the hooks on the backward passes of its modules off a net, which is a copy."""
    for module in net.modules():
        for kind in ("_backward_hooks", "_backward_pre_hooks"):
            getattr(module, kind, {}).clear()


def address_of(tensor: Tensor) -> int:
    """The address of what a tensor is in C++, which `torch.utils.swap_tensors` exchanges."""
    found: int = getattr(tensor, "_cdata", 0)
    return found


def drop_accumulate_hooks(parameter: nn.Parameter) -> None:
    """Take all hooks off a parameter that are called when a gradient was accumulated in it."""
    parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]


def _one_by_one(method: str) -> Callable[..., None]:
    def run(*lists: list[Tensor]) -> None:
        for tensors in zip(*lists, strict=True):
            getattr(Tensor, method)(*tensors)

    return run


# What each of many tensors gets in place, of one list or of two.
copy_all: Callable[[list[Tensor], list[Tensor]], object] = or_else("torch._foreach_copy_", _one_by_one("copy_"))
subtract_all: Callable[[list[Tensor], list[Tensor]], object] = or_else("torch._foreach_sub_", _one_by_one("sub_"))
negate_all: Callable[[list[Tensor]], object] = or_else("torch._foreach_neg_", _one_by_one("neg_"))

# Calls a function when CUDA is first used, or now if it is in use: so nothing has to be asked before, in each call of a hook.
at_start_of_cuda: Callable[[Callable[[], object]], object] = or_else("torch.cuda._lazy_call", lambda call: call())


SCALED = "found_inf"
"""The attribute that a GradScaler sets of a fused optimizer while it steps."""

HOOKS_BEFORE_STEP = "_optimizer_step_pre_hooks"
"""The attribute in which an optimizer keeps its own hooks before a step."""


def step_was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler told a fused optimizer on the CPU that this step overflowed. On a device, asking would synchronise."""
    found = vars(optimizer).get(SCALED)
    return isinstance(found, Tensor) and found.device.type == "cpu" and bool(found.item())


def made_by_graph(tensor: Tensor) -> bool:
    """Whether a compiled graph returned `tensor` among others; if they are computed from it, a hook outside misses gradients."""
    node: Any = tensor.grad_fn
    if type(node).__name__ != "CompiledFunctionBackward":
        return False
    try:
        return len(reach("torch._C._FunctionBase._input_metadata").__get__(node)) > 1
    except MissingInTorchError:
        return True


def graph_task_address() -> int | None:
    """The address of the function in C++ that `graph_task` calls; None if it is not found."""
    try:
        library = cpu_library()
        return ctypes.cast(library._ZN5torch8autograd25get_current_graph_task_idEv, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def _has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of vmap or grad: it has no memory of its own then."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not has_memory(tensor)


if or_else("torch._C._functorch.maybe_current_level", None) is None:  # then nothing else tells of them
    is_batched = _has_no_memory


def inside_transform() -> bool:
    """Whether this code runs inside vmap, grad or functionalisation."""
    return _interpreter() is not None


def is_being_traced() -> bool:
    """Whether `torch.jit.trace` or `make_fx` traces a program in this thread."""
    return _jit_trace() is not None or _proxy_is_on()


def _proxy_is_on() -> bool:
    if _dispatch_mode is None or _PROXY is None:
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        return get_proxy_mode() is not None
    return _dispatch_mode(_PROXY) is not None


def is_plain_moment(tensor: Tensor) -> bool:
    """Whether `tensor` is one of numbers, and no mode of PyTorch or of the user would change a copy of it, or see that it is made.

    Autocast and inference mode do neither: a copy into memory that was made outside of inference mode is what it is elsewhere.
    """
    return not (_count_dispatch() or is_batched(tensor) or _interpreter() is not None or _jit_trace() is not None)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call `call` when the backward ends that runs in this thread.

    Raises:
        MissingInTorchError: this torch cannot do that.
    """
    reach("torch.autograd.Variable._execution_engine").queue_callback(call)


def may_run_again() -> bool:
    """Whether a checkpoint may run this forward again, or does so: hooks keep what it saves, or a backward is under way."""
    hooks = or_else("torch._C._autograd._top_saved_tensors_default_hooks", lambda _: True)
    return graph_task() != -1 or hooks(True) is not None


def outside_modes(call: Callable[..., Any], *args: Any) -> Any:
    """Call `call(*args)` with the user's modes off, and return what it returns; they are on again then, however it ends.

    Modes of `torch.compile` and other tracing stay. So does the default device, unless other function modes are on too.

    >>> import torch
    >>> from torch.overrides import TorchFunctionMode
    >>> class Names(TorchFunctionMode):
    ...     def __torch_function__(self, function, types, args=(), kwargs=None):
    ...         print(function.__name__)
    ...         return function(*args, **(kwargs or {}))
    >>> with Names():
    ...     _ = torch.add(torch.ones(1), 1)
    ...     _ = outside_modes(torch.add, torch.ones(1), 1)
    ones
    add
    ones
    """
    if not _count_dispatch() and not _count_function():
        return call(*args)
    if MODES_STAY:
        raise MissingInTorchError(MODES_STAY)
    # Both lists are filled, and emptied again, by single calls into C: an asynchronous exception comes before or after them.
    dispatch: list[Any] = [None]
    function: list[Any] = [None]
    put_back: partial[Any] = partial(
        deque, chain(map(_push_dispatch, iter(dispatch.pop, None)), map(_push_function, iter(function.pop, None))), 0
    )
    try:
        dispatch.extend(map(_pop_dispatch, repeat(None, _user_dispatch_modes())))
        function.extend(starmap(_pop_function, repeat((), _user_function_modes())))
        return call(*args)
    finally:
        put_back()


@contextmanager
def eagerly() -> Iterator[None]:
    """A context in which nothing is compiled, and compiled modules run eagerly."""
    if not dynamo_is_imported():  # its import takes seconds, and nothing is compiled without it
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def each_operator(seen: Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]) -> AbstractContextManager[Any]:
    """A context in which `seen` is called after each operator, with its name, arguments and output.

    A name is such as "bmm.default", without underscores in front.

    Raises:
        MissingInTorchError: this torch cannot do that.

    >>> with each_operator(lambda name, args, kwargs, output: print(name)):
    ...     _ = torch.ones(2) + 1
    ones.default
    add.Tensor
    """

    def call(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = operator(*args, **kwargs)
        seen(str(operator).partition(".")[2].lstrip("_"), args, kwargs, output)
        return output

    return in_place_of_operators(call)


def in_place_of_operators(call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> AbstractContextManager[Any]:
    """A context in which `call(operator, args, kwargs)` is called in place of each operator; it returns the output.

    Operators of a backward are among them, in whichever thread they run: autograd takes the modes of a thread along.

    Raises:
        MissingInTorchError: this torch cannot do that.

    >>> with in_place_of_operators(lambda operator, args, kwargs: operator(*args, **kwargs) * 2):
    ...     x = torch.ones(2)
    >>> x
    tensor([2., 2.])
    """
    mode: Any = reach("torch.utils._python_dispatch.TorchDispatchMode")

    def dispatch(self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return call(func, args, kwargs or {})

    found: AbstractContextManager[Any] = type("InPlaceOfOperators", (mode,), {"__torch_dispatch__": dispatch})()
    return found


def autograd_node() -> Any:
    """The node of autograd whose backward runs in this thread; None if none does, or if this torch does not tell."""
    return _node()


def compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def _user_dispatch_modes() -> int:
    """How many dispatch modes on the stack are the user's."""
    count = _count_dispatch()
    return count and count - sum(_dispatch_mode(key) is not None for key in _INTERNAL)


def _user_function_modes() -> int:
    """How many function modes to take off: none if they only set the default device."""
    modes = map(_function_mode, range(_count_function()))
    return 0 if all(isinstance(mode, _DEVICE_MODES) for mode in modes) else _count_function()
