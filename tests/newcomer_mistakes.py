"""Mistakes of people who meet the library for the first time, and what tells them of each.

A mistake is told by an error (`raises`), by a warning (`warns`) or by a line of the report (`reports`: the function returns the
recorder, or the recorder and the net, which would be gone otherwise). Or it is none, and the numbers are right (`right`: the
function returns what was found, and what plain PyTorch computes). The texts are those that a message must contain: what is wrong,
and what to do.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from newcomer_tasks import batches, network, outputs, train
from torch import nn

from recorders import (
    BackwardMonitor,
    CallMonitor,
    ForwardMonitor,
    MergeError,
    NotARecordingError,
    OptimizerStateMonitor,
    ParameterGradientMonitor,
    Recorder,
    RecordingNotFoundError,
    RecordingWarning,
    SelectionError,
    StateMonitor,
    TargetError,
    compare,
    findings,
    load,
    merge,
    presets,
)
from recorders.errors import RecordingExistsError
from reducers import (
    ArgumentError,
    Histogram,
    Masked,
    Max,
    Mean,
    Moments,
    Norm,
    PatternError,
    PerObservation,
    Product,
    Quantile,
    ReducerTypeError,
    Summary,
    TopK,
)

Function = Callable[[], Any]


class Mistake(NamedTuple):
    """What somebody does, and by which way ("raises", "warns", "reports" or "right") which texts tell of it."""

    function: Function
    way: str
    kind: type[BaseException] | None = None
    texts: tuple[str, ...] = ()
    slow: bool = False


MISTAKES: dict[str, Mistake] = {}


def _row(way: str, kind: type[BaseException] | None, texts: tuple[str, ...], slow: bool = False) -> Callable[[Function], Function]:
    def add(function: Function) -> Function:
        assert function.__name__ not in MISTAKES
        MISTAKES[function.__name__] = Mistake(function, way, kind, texts, slow)
        return function

    return add


def raises(kind: type[BaseException], *texts: str) -> Callable[[Function], Function]:
    return _row("raises", kind, texts)


def warns(*texts: str) -> Callable[[Function], Function]:
    return _row("warns", RecordingWarning, texts)


def reports(*texts: str, slow: bool = False) -> Callable[[Function], Function]:
    return _row("reports", None, texts, slow)


def right(function: Function) -> Function:
    return _row("right", None, ())(function)


def slowly_right(function: Function) -> Function:
    return _row("right", None, (), slow=True)(function)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


class Says(nn.Module):
    def forward(self, x: torch.Tensor) -> str:
        return "hi"


BATCH = batches(1)[0]


def means() -> Recorder:
    return Recorder(ForwardMonitor(Mean()))


def run(monitor: Any, net: nn.Module | None = None, **criteria: Any) -> Recorder:
    """A recorder that saw one batch, without its net."""
    net = network() if net is None else net
    with Recorder(monitor).modules(net, **(criteria or {"names": "0"})) as recorder:
        net(BATCH)
    return recorder


def saved(path: str, monitor: Any = None, **criteria: Any) -> str:
    run(ForwardMonitor(Mean()) if monitor is None else monitor, **criteria).save(path)
    return path


def mean_of_first(seen: list[torch.Tensor]) -> torch.Tensor:
    return outputs(network()[0], seen).mean()


# Choosing modules


@raises(SelectionError, "no module named 'encodr'", "did you mean 'encoder'")
def a_name_with_a_typo() -> None:
    means().modules(Named(), names=["head", "encodr"])


@raises(SelectionError, "no module named 'layers.*'", "there are 3 modules: (net), encoder, head")
def a_glob_that_matches_nothing() -> None:
    means().modules(Named(), names="layers.*")


@raises(SelectionError, "matches no module", "of types {'Named': 1, 'Linear': 2}")
def a_type_that_the_net_does_not_have() -> None:
    means().modules(Named(), types=nn.Conv2d)


@raises(TypeError, "types='Linear'", "give a module class")
def a_type_as_text() -> None:
    means().modules(Named(), types="Linear")


@raises(TypeError, "types=Linear(in_features=2", "give a module class")
def an_instance_as_type() -> None:
    means().modules(Named(), types=nn.Linear(2, 2))


@raises(TargetError, "got type: <class", "a torch.nn.Module is needed")
def the_class_of_the_net() -> None:
    means().modules(Named)


@raises(TypeError, "names=Linear(", "give names, globs")
def a_module_as_name() -> None:
    net = Named()
    means().modules(net, names=net.encoder)


@raises(TargetError, "got generator", "a torch.nn.Module is needed")
def parameters_in_place_of_the_net() -> None:
    means().modules(network().parameters())


@raises(SelectionError, "exclude='encodr' is the name of no module", "did you mean 'encoder'")
def a_name_to_exclude_with_a_typo() -> None:
    means().modules(Named(), exclude="encodr")


@raises(SelectionError, "no module at [9]", "indices run from 0 to 3")
def an_index_that_is_too_large() -> None:
    means().modules(network(), indices=9)


@raises(SelectionError, "has no subrecorders", "recorder.modules(net)")
def no_modules_selected() -> None:
    with means():
        network()(BATCH)


@raises(SelectionError, "none of the 1 modules selected has anything to watch", "choose modules that have it")
def gradients_of_parameters_of_a_relu() -> None:
    Recorder(ParameterGradientMonitor(Norm())).modules(network(), types=nn.ReLU)


@raises(SelectionError, "has anything to watch for StateMonitor", "did you mean 'weight'")
def an_attribute_with_a_typo() -> None:
    Recorder(StateMonitor(Mean(), "wieght")).modules(network(), types=nn.Linear)


# Making monitors and recorders


@raises(TypeError, "got the class", "write ForwardMonitor(Mean())")
def a_monitor_class() -> None:
    Recorder(ForwardMonitor)


@raises(ReducerTypeError, "got the class", "write Mean(), not Mean")
def a_reducer_class() -> None:
    ForwardMonitor(Mean)


@raises(TypeError, "needs a monitor", "got Mean", "ForwardMonitor(Mean(...))")
def a_reducer_without_a_monitor() -> None:
    Recorder(Mean())


@raises(TypeError, "got Sequential", "the net goes to Recorder(...).modules(net)")
def the_net_first() -> None:
    Recorder(network(), ForwardMonitor(Mean()))


@raises(TypeError, "health: first is a number of steps; got Sequential", "the net goes to presets.health().modules(net)")
def the_net_as_argument_of_a_preset() -> None:
    presets.health(network())


@raises(TypeError, "2 monitors without a name", "write Recorder(out=..., grad=...)")
def two_monitors_without_names() -> None:
    Recorder(ForwardMonitor(Mean()), BackwardMonitor(Norm()))


@raises(TypeError, "got [ForwardMonitor", "several monitors by name")
def a_list_of_monitors() -> None:
    Recorder([ForwardMonitor(Mean()), BackwardMonitor(Norm())])


@raises(TypeError, "already sits on one", "needs a monitor without a module")
def a_monitor_that_sits_on_a_module() -> None:
    net = network()
    Recorder(ForwardMonitor(Mean(), net[0])).modules(net)


@raises(ReducerTypeError, "each part of a Product has a name", "write Product(a=Mean")
def a_product_of_parts_without_names() -> None:
    Product(Mean(), Max())


@raises(TypeError, "got ['every_steps']", "'every_step'")
def an_option_with_a_typo() -> None:
    ForwardMonitor(Mean(), every_steps=100)


@raises(TypeError, "steps=10", "give range(100, 200)")
def steps_as_a_number() -> None:
    ForwardMonitor(Mean(), steps=10)


@raises(TypeError, "steps=[1.0, 2.0]", "some whole numbers")
def steps_as_floats() -> None:
    ForwardMonitor(Mean(), steps=[1.0, 2.0])


@raises(ValueError, "every=0", "at least 1")
def every_call_in_zero() -> None:
    ForwardMonitor(Mean(), every=0)


@raises(ValueError, "budget=3", "0.03 for 3 %")
def a_budget_in_percent() -> None:
    Recorder(ForwardMonitor(Mean()), budget=3)


@raises(TypeError, "train_update='no'", "True or False")
def a_text_for_yes_or_no() -> None:
    ForwardMonitor(Mean(), train_update="no")


@raises(TypeError, "filter_=True", "filter_ must be callable")
def a_filter_that_is_no_function() -> None:
    ForwardMonitor(Mean(), filter_=True)


# Patterns and arguments of reducers


@raises(PatternError, "'b c > c' has no '->'", "as in 'b c h w -> c'")
def an_arrow_with_a_typo() -> None:
    Mean("b c > c")


@raises(PatternError, "'channel'", "did you mean 'channels'")
def channels_with_a_typo() -> None:
    Mean("channel")


@raises(PatternError, 'duplicate dimension "b"', "name each axis once")
def an_axis_named_twice() -> None:
    Mean("b b -> b")


@raises(PatternError, "keeps ['d']", "write all axes on the left")
def an_axis_that_is_only_on_the_right() -> None:
    Mean("b c -> d")


@raises(PatternError, "got int 0", "a pattern is a string such as")
def an_axis_as_a_number() -> None:
    Mean(0)


@warns("'b c h w -> c' needs 4 axes, got 2", "write '...' for any number of axes")
def a_pattern_with_too_many_axes() -> None:
    run(ForwardMonitor(Mean("b c h w -> c")))


@raises(ArgumentError, "got -1", "TopK takes k, an integer from 1")
def a_negative_k() -> None:
    TopK(k=-1)


@raises(ArgumentError, "got (5, 50, 95)", "a share from 0 to 1")
def quantiles_in_percent() -> None:
    Quantile(q=(5, 50, 95))


@raises(ArgumentError, "got 0", "bins, an integer from 1")
def a_histogram_without_bins() -> None:
    Histogram(bins=0, low=0, high=1)


@raises(ArgumentError, "between low=1 and high=0", "low must be less than high")
def a_histogram_upside_down() -> None:
    Histogram(bins=4, low=1, high=0)


@raises(ArgumentError, "low=None, high=None", "a positive number of bins with finite low and high")
def a_histogram_without_a_range() -> None:
    Histogram(bins=10)


@raises(ReducerTypeError, "got (ndarray)", "torch.as_tensor(x)")
def an_array_of_numpy_for_a_reducer() -> None:
    Mean().update({}, np.ones(3))


# Callables


@right
def a_map_that_takes_the_output_only() -> tuple[Any, Any]:
    return run(ForwardMonitor(Mean(), map_=lambda output: (output,)))["0"].peek(), mean_of_first([BATCH])


@warns("map_ must return a tensor, or a tuple", "it returned list")
def a_map_that_returns_a_list() -> None:
    run(ForwardMonitor(Mean(), map_=lambda output: [output]))


@warns("filter_ must return True or False", "tensor of shape (10, 6)", "use .any() or .all()")
def a_filter_that_returns_a_tensor() -> None:
    run(ForwardMonitor(Mean(), filter_=lambda output: output > 0))


@warns("changed a tensor of the training in place", "return a new one, as x.abs() does")
def an_op_that_changes_in_place() -> None:
    run(ForwardMonitor(Mean(), op_=lambda output: output.abs_()))


@reports("1 operand was None", "let it return a tensor")
def an_op_that_forgets_return() -> Any:
    return run(ForwardMonitor(Mean(), op_=lambda output: None))


@warns("op_ returned a list of numbers", "return a tensor, not its tolist()")
def an_op_that_returns_a_list() -> None:
    run(ForwardMonitor(Mean(), op_=lambda output: output.tolist()))


@right
def an_op_that_returns_a_number() -> tuple[Any, Any]:
    found = run(ForwardMonitor(Mean(), op_=lambda output: output.double().mean().item()))
    return found["0"].peek(), mean_of_first([BATCH])


# What a net does


@reports("0 recorded of 0 calls", "only its .forward")
def a_call_of_forward() -> Any:
    layer = network()[0]
    with means().modules(layer) as recorder:
        layer.forward(BATCH)
    return recorder, layer


@reports("it was replaced after the selection", "select again")
def a_layer_that_is_replaced_later() -> Any:
    net = network()
    recorder = means().modules(net, types=nn.Linear)
    net[0] = nn.Linear(8, 6)
    with recorder:
        net(BATCH)
    return recorder, net


@reports("a copy of it was called, which has no hooks")
def a_copy_of_the_net() -> Any:
    net = network()
    with means().modules(net) as recorder:
        copy.deepcopy(net)(BATCH)
    return recorder, net


@reports("its module no longer exists", "keep the net")
def a_net_that_is_gone_before_the_training() -> Any:
    recorder = means().modules(network(), names="0")
    with recorder:
        network()(BATCH)
    return recorder


@reports("a module no longer exists", "keep the net")
def a_plan_of_a_net_that_is_gone() -> Any:
    return means().modules(network(), names="0").plan(BATCH)


@warns("no tensor to record in str", "pick one with op_")
def a_module_that_returns_a_text() -> None:
    run(ForwardMonitor(Mean()), Says(), names="(net)")


@warns("keeps shape (10, 6)", "now met (4, 6)", "keep fewer axes in the pattern")
def batches_of_other_sizes_with_the_batch_axis_kept() -> None:
    net = network()
    with Recorder(ForwardMonitor(Mean("b c -> b c"))).modules(net, names="0"):
        net(BATCH)
        net(BATCH[:4])


@right
def integers_as_inputs() -> tuple[Any, Any]:
    return run(ForwardMonitor(Mean(), op_=lambda output: (output > 0).long()))["0"].peek(), (
        (outputs(network()[0], [BATCH]) > 0).double().mean()
    )


@reports("every observation was empty", "look at the batches")
def empty_batches() -> Any:
    net = network()
    with Recorder(ForwardMonitor(Summary())).modules(net, names="0") as recorder:
        net(BATCH[:0])
    return recorder


@right
def an_empty_batch_among_others() -> tuple[Any, Any]:
    net = network()
    with means().modules(net, names="0") as recorder:
        for batch in (BATCH, BATCH[:0]):
            net(batch)
    return recorder["0"].peek(), mean_of_first([BATCH])


@reports("0 recorded of 0 calls", "its module was never called")
def a_generator_that_is_used_up() -> Any:
    net, loader = network(), iter(batches(2))
    for batch in loader:
        net(batch)
    with means().modules(net) as recorder:
        for batch in loader:
            net(batch)
    return recorder, net


@right
def layers_that_are_shared() -> tuple[Any, Any]:
    layer = nn.Linear(8, 8)
    net = nn.Sequential(layer, nn.ReLU(), layer)
    recorder = run(ForwardMonitor(Mean()), net, types=nn.Linear)
    return (recorder["2"].peek(), recorder["0"].samples), (outputs(layer, [BATCH, net[:2](BATCH)]).mean(), 2)


@right
def data_parallel_around_the_net() -> tuple[Any, Any]:
    return run(ForwardMonitor(Mean()), nn.DataParallel(network()))["0"].peek(), mean_of_first([BATCH])


@slowly_right
def distributed_data_parallel_around_the_net() -> tuple[Any, Any]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{Path('store').absolute()}", rank=0, world_size=1)
    try:
        found = run(ForwardMonitor(Mean()), nn.parallel.DistributedDataParallel(network()))["0"].peek()
    finally:
        torch.distributed.destroy_process_group()
    return found, mean_of_first([BATCH])


@slowly_right
def compiled_before_it_is_recorded() -> tuple[Any, Any]:
    net = network()
    compiled = torch.compile(net, backend="aot_eager")
    compiled(BATCH)
    with means().modules(net, names="0") as recorder:
        compiled(BATCH)
    return recorder["0"].peek(), mean_of_first([BATCH])


class Computed(torch.utils.data.Dataset[torch.Tensor]):
    """Calls a net for each item, so in a worker."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.net(BATCH[index]).detach()


@reports("a process that was forked, such as a worker of a DataLoader", "what it records stays there", slow=True)
def a_net_called_in_a_worker() -> Any:
    net = network()
    recorder = means().modules(net, names="0")
    assert len([*torch.utils.data.DataLoader(Computed(net), num_workers=1, multiprocessing_context="fork")]) == 2
    return recorder, net


# Training


@warns("the clock stands at step 0 still", "call recorder.attach(optimizer)")
def steps_without_an_optimizer() -> None:
    net = network()
    with Recorder(ForwardMonitor(Mean(), steps=range(2, 4))).modules(net, names="0"):
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), batches())


@raises(TypeError, "got StepLR", "attached to a torch.optim.Optimizer")
def a_scheduler_attached() -> None:
    net = network()
    means().modules(net).attach(torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net.parameters(), lr=0.1), 1))


@warns("a second optimizer advances the clock", "attach one of them")
def two_optimizers_attached() -> None:
    net = network()
    first, second = (torch.optim.SGD(net[index].parameters(), lr=0.1) for index in (0, 2))
    Recorder(ForwardMonitor(Mean(), every_step=10)).modules(net).attach(first).attach(second)


@warns("an optimizer is attached, which advances the clock already", "leave out recorder.step()")
def an_optimizer_attached_and_steps_by_hand() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Recorder(ForwardMonitor(Mean(), every_step=2)).modules(net, names="0").attach(optimizer) as recorder:
        train(net, optimizer, batches(), recorder.step)


@right
def an_optimizer_attached_twice() -> tuple[Any, Any]:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder = Recorder(ForwardMonitor(Mean(), every_step=2)).modules(net, names="0").attach(optimizer).attach(optimizer)
    with recorder:
        train(net, optimizer, batches(5))
    return recorder["0"].samples, 3


@reports("no gradient (frozen or unused)", "do not call zero_grad() between backward() and step()")
def zero_grad_before_the_step() -> Any:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Recorder(ParameterGradientMonitor(Norm())).modules(net) as recorder:
        train(net, optimizer, batches(1), optimizer.zero_grad)
    return recorder, net


@reports("no optimizer step changed its parameters", "call optimizer.step()")
def gradients_without_a_step() -> Any:
    net = network()
    with Recorder(ParameterGradientMonitor(Norm())).modules(net) as recorder:
        net(BATCH).sum().backward()
    return recorder, net


@reports("no gradient came", "the loss does not use its output")
def a_loss_that_is_detached() -> Any:
    net = network()
    with Recorder(BackwardMonitor(Norm())).modules(net) as recorder:
        net(BATCH).detach().requires_grad_().sum().backward()
    return recorder, net


@reports("no gradient will come (frozen or not floating point)")
def a_frozen_layer() -> Any:
    net = network()
    net[0].requires_grad_(False)
    with Recorder(BackwardMonitor(Norm())).modules(net) as recorder:
        net(BATCH).sum().backward()
    return recorder, net


@reports("no gradient will come (no_grad)", "call the net with gradients on")
def gradients_under_no_grad() -> Any:
    with torch.no_grad():
        return run(BackwardMonitor(Norm()))


@reports("not recorded in train mode", "call net.eval()")
def evaluation_without_eval() -> Any:
    return run(ForwardMonitor(Mean(), train_update=False))


# What is given for a batch


@warns("['ids'] of given=('ids',) missing", "run the net in `with recorder.given(ids=...):`")
def ids_that_are_missing() -> None:
    run(ForwardMonitor(TopK("b c -> c", k=2), given="ids"))


@warns("given 'ids' has length 5, but the observation has length 10", "give one value for each sample")
def ids_of_another_length() -> None:
    net = network()
    recorder = Recorder(ForwardMonitor(TopK("b c -> c", k=2), given="ids")).modules(net, names="0")
    with recorder.given(ids=torch.arange(5)):
        net(BATCH)


@warns("no monitor of this recorder takes 'ids'", "name it in the monitor")
def ids_that_no_monitor_takes() -> None:
    net = network()
    recorder = Recorder(ForwardMonitor(TopK("b c -> c", k=2))).modules(net, names="0")
    with recorder.given(ids=torch.arange(10)):
        net(BATCH)


@warns("takes an observation and its mask; got 1 of the 2 tensors", "given='mask'")
def a_mask_that_is_not_named() -> None:
    run(ForwardMonitor(Masked(Mean("b c -> c"))))


@right
def ids_as_an_array_of_numpy() -> tuple[Any, Any]:
    net = network()
    recorder = Recorder(ForwardMonitor(TopK("b c -> c", k=2), given="ids")).modules(net, names="0")
    with recorder.given(ids=np.arange(10) + 70):
        net(BATCH)
    return recorder["0"].peek()["id"], outputs(network()[0], [BATCH]).topk(2, dim=0).indices.T + 70


# Pushing


@warns("no tensor to record in str", "pick one with op_")
def a_text_pushed() -> None:
    Recorder(loss=CallMonitor(Mean()))["loss"].push("hi")


@warns("push got 2 values, of which one would be recorded", "push each by itself")
def two_values_pushed() -> None:
    Recorder(loss=CallMonitor(Mean()))["loss"].push(1.0, 2.0)


@raises(TargetError, "captures by itself", "push into a CallMonitor")
def a_value_pushed_into_a_forward_monitor() -> None:
    means().modules(network(), names="0")["0"].push(torch.ones(2))


@raises(AttributeError, "has no attribute 'loss'", "write recorder['loss']")
def a_subrecorder_as_an_attribute() -> None:
    _ = Recorder(loss=CallMonitor(Mean())).loss


# Looking


@raises(SelectionError, "no subrecorder 'encoder'", "there are ['(net)', '0', '1', '2']")
def a_subrecorder_that_does_not_exist() -> None:
    means().modules(network())["encoder"]


@raises(SelectionError, "has no stat 'kurtosis'", "there are ['count', 'mean', 'var', 'std']")
def a_statistic_that_was_not_recorded() -> None:
    run(ForwardMonitor(Moments())).value("0", stat="kurtosis")


@reports("0 recorded of 0 calls", "its module was never called")
def results_before_anything_was_recorded() -> Any:
    net = network()
    recorder = means().modules(net)
    assert recorder.compute() == {}
    assert recorder["0"].peek() is None
    return recorder, net


@right
def no_with_and_no_register() -> tuple[Any, Any]:
    net = network()
    recorder = means().modules(net, names="0")
    net(BATCH)
    return recorder["0"].peek(), mean_of_first([BATCH])


@right
def compute_in_the_loop() -> tuple[Any, Any]:
    net = network()
    with means().modules(net, names="0") as recorder:
        found = [(net(batch), recorder.compute()["0"])[1] for batch in batches(3)]
    return torch.stack(found), torch.stack([mean_of_first(batches(3)[: count + 1]) for count in range(3)])


@right
def reset_in_the_loop() -> tuple[Any, Any]:
    net, found = network(), []
    with means().modules(net, names="0") as recorder:
        for batch in batches(3):
            recorder.reset()
            net(batch)
            found.append(recorder["0"].peek())
    return torch.stack(found), torch.stack([mean_of_first([batch]) for batch in batches(3)])


@right
def with_in_the_loop() -> tuple[Any, Any]:
    net = network()
    recorder = means().modules(net, names="0")
    for batch in batches(3):
        with recorder:
            net(batch)
    return recorder["0"].peek(), mean_of_first(batches(3))


@right
def one_monitor_in_two_recorders() -> tuple[Any, Any]:
    net, monitor = network(), ForwardMonitor(Mean())
    with Recorder(monitor).modules(net, names="0") as first, Recorder(monitor).modules(net, names="2") as second:
        net(BATCH)
    return (first["0"].peek(), second["2"].peek()), (mean_of_first([BATCH]), outputs(network(), [BATCH]).mean())


@warns("an equal recorder is on these 1 places already", "call recorders.detach_all(net) first")
def a_cell_that_runs_twice() -> None:
    net = network()
    kept = [means().modules(net, names="0") for _ in range(2)]
    assert len(kept) == 2


@right
def a_net_that_is_deleted() -> tuple[Any, Any]:
    return run(ForwardMonitor(Mean()))["0"].peek(), mean_of_first([BATCH])


@right
def a_recorder_that_is_pickled() -> tuple[Any, Any]:
    return pickle.loads(pickle.dumps(run(ForwardMonitor(Mean()))))["0"].peek(), mean_of_first([BATCH])


# Files


@right
def each_step_saved_to_one_path() -> tuple[Any, Any]:
    net = network()
    with means().modules(net, names="0") as recorder:
        for batch in batches(3):
            net(batch)
            recorder.save("run")
    return load("run")["0"].peek(), mean_of_first(batches(3))


@raises(
    RecordingExistsError, "run holds the recording of another net", "save into another folder, or replace it with overwrite=True"
)
def a_save_over_the_recording_of_another_net() -> None:
    saved("run")
    run(ForwardMonitor(Mean()), Named(), names=["encoder", "head"]).save("run")


@raises(NotARecordingError, "mine holds ['thesis.txt'] and no recording", "save into a new folder")
def a_save_into_a_folder_of_something_else() -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("x")
    saved("mine")


@raises(RecordingNotFoundError, "there is nothing at nowhere", "['monday']")
def a_path_that_does_not_exist() -> None:
    saved("monday")
    load("nowhere")


@raises(NotARecordingError, "net.pt is no recording", "save one with recorder.save(path)")
def a_file_of_torch_save() -> None:
    torch.save(network().state_dict(), "net.pt")
    load("net.pt")


@raises(NotARecordingError, "folder is no recording", "save one with recorder.save(path)")
def a_folder_of_something_else() -> None:
    Path("folder").mkdir()
    Path("folder/a.txt").write_text("x")
    load("folder")


@raises(MergeError, "the reducers differ: Mean", "only what equal reducers recorded can be merged")
def recordings_of_other_reducers() -> None:
    merge([saved("a"), saved("b", ForwardMonitor(Max()))]).compute()


@raises(MergeError, "the names differ: only a has ['0']", "missing='keep'")
def recordings_of_other_modules() -> None:
    merge([saved("a"), saved("b", names="2")])


@raises(MergeError, "a is given twice", "it would count twice")
def a_recording_merged_twice() -> None:
    merge([saved("a"), "a"])


@raises(MergeError, "merged with itself", "give another recorder")
def a_recorder_merged_with_itself() -> None:
    recorder = run(ForwardMonitor(Mean()))
    recorder.merge(recorder)


@raises(TypeError, "merge('monday')", "give several paths in a list")
def one_path_to_merge() -> None:
    merge(saved("monday"))


@raises(TypeError, "got Recorder", "one.merge(other)")
def recorders_in_place_of_paths() -> None:
    merge([run(ForwardMonitor(Mean()))] * 2)


@raises(TypeError, "compare needs a recorder or a recording; got 'monday'", "recorders.load(path)")
def paths_to_compare() -> None:
    compare(saved("monday"), saved("tuesday"))


@raises(TypeError, "findings needs a recorder or a recording; got 'monday'", "recorders.load(path)")
def a_path_to_find_faults_in() -> None:
    findings(saved("monday"))


@warns("Adam keeps no 'exp_average'", "it keeps ['exp_avg', 'exp_avg_sq', 'step']")
def a_state_of_the_optimizer_with_a_typo() -> None:
    net = network()
    with Recorder(OptimizerStateMonitor(Norm(), "exp_average")).modules(net):
        train(net, torch.optim.Adam(net.parameters()), batches(1))


@raises(ValueError, "backend='excel'", "choose 'pandas' or 'polars'")
def a_table_of_an_unknown_kind() -> None:
    run(ForwardMonitor(Mean())).to_frame("excel")


@right
def steps_kept_apart_by_one_reducer() -> tuple[Any, Any]:
    net = network()
    with Recorder(ForwardMonitor(PerObservation(Mean()))).modules(net, names="0") as recorder:
        for batch in batches(3):
            net(batch)
    return recorder["0"].peek(), torch.stack([mean_of_first([batch]) for batch in batches(3)])
