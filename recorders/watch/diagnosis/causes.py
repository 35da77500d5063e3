"""What may be wrong: the kinds of findings, why each matters, and their likely causes, each with what to try."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Cause(NamedTuple):
    """A cause of faults.

    Attributes:
        text: as it stands in a sentence.
        remedy: what to try first.
    """

    text: str
    remedy: str


class FindingKind(NamedTuple):
    """A kind of finding.

    Attributes:
        severity: how sure it is that the training is at fault; see `docs/findings-scores.md` for how often each kind is right.
        why: why it matters.
        causes: the likely causes, most likely first, if nothing else is known.
        remedy: what to try first, whatever the cause; "" if the remedy of the first cause is meant.
    """

    severity: Literal["error", "warning", "notice"]
    why: str
    causes: tuple[str, ...]
    remedy: str = ""


CAUSES: dict[str, Cause] = {
    # optimisation
    "rate-too-high": Cause("the learning rate is too high", "a learning rate smaller by a factor of 10, or a warm-up"),
    "rate-too-low": Cause("the learning rate is too low", "a learning rate larger by a factor of 10 to 100"),
    "gradients-not-cleared": Cause("gradients are never cleared", "optimizer.zero_grad() in each step, before backward"),
    "weight-decay": Cause(
        "weight decay is too strong", "a weight decay smaller by a factor of 10 to 100, or AdamW in place of Adam"
    ),
    "schedule": Cause(
        "the schedule of the learning rate", "check the number of steps that the scheduler was given, and where it is stepped"
    ),
    "clipping": Cause(
        "gradients are clipped to far too small a norm",
        "a larger maximum norm: 1 is usual; the gradient norms are in the recording",
    ),
    "ascent": Cause("the optimizer climbs the loss", "check the sign of the loss, and maximize="),
    "lost-updates": Cause(
        "weights of few bits lose their updates", "keep float32 weights and use torch.autocast, or an optimizer with float32 copies"
    ),
    "not-in-optimizer": Cause("the optimizer does not hold the parameters", "give its parameters to the optimizer"),
    "no-steps": Cause("no optimizer steps, or at a rate of 0", "call optimizer.step(), and check the learning rate"),
    "momentum": Cause("the momentum is too high", "a momentum of 0.9, and betas of (0.9, 0.999)"),
    "epsilon": Cause("the epsilon of the optimizer is too large", "the default of the optimizer, 1e-8"),
    "loss-scale": Cause(
        "the loss has a far too small or too large factor", "a mean over the batch in place of a sum, and no further factor"
    ),
    "wrong-loss": Cause(
        "the loss does not fit the task", "check which loss gets what: logits or probabilities, classes or one-hot"
    ),
    # architecture
    "dead-units": Cause(
        "units that are never active", "a smaller learning rate, a fresh initialisation with biases at zero, or a leaky activation"
    ),
    "saturation": Cause(
        "activation functions at their flat ends",
        "smaller initial weights, normalisation before the activation, or a smaller learning rate",
    ),
    "vanishing-gradients": Cause(
        "gradients that shrink from layer to layer",
        "normalisation layers, residual connections, ReLU in place of saturating activations",
    ),
    "exploding-gradients": Cause(
        "gradients that grow from layer to layer", "normalisation layers, smaller initial weights, gradient clipping"
    ),
    "initialisation": Cause("the initial weights", "the default initialisation of PyTorch, or one by fan-in"),
    "symmetry": Cause("units that are equal from the start", "random initial weights"),
    "no-nonlinearity": Cause("no activation function between the layers", "an activation function after each hidden layer"),
    "detached": Cause(
        "the graph is cut: detach(), .data, .item(), no_grad, NumPy, or a step without slope such as round",
        "look for what cuts the graph between this layer and the loss",
    ),
    "never-ran": Cause("the layer is not called", "call the module itself in forward, or remove it"),
    "frozen": Cause(
        "the parameters are frozen", "give its parameters to the optimizer; if it is frozen on purpose, set requires_grad=False"
    ),
    "mask": Cause(
        "the mask of the attention", "check which positions it lets through: True means masked in some modules and kept in others"
    ),
    "output-activation": Cause(
        "an activation before a loss that applies its own",
        "give logits to the loss: no softmax before cross_entropy, no sigmoid before BCEWithLogitsLoss",
    ),
    "dropout": Cause("dropout: too much, or in evaluation, too", "a dropout of 0.1 to 0.5; in functions, training=self.training"),
    "bottleneck": Cause(
        "too little is passed on: a narrow layer, or a part of what there is", "a wider layer, or all of what there is"
    ),
    "attention-scale": Cause("the scale of the attention scores", "scores divided by the square root of the head's width"),
    "broadcast": Cause("output and target have shapes that broadcast", "equal shapes: squeeze the output, or unsqueeze the target"),
    "normalisation": Cause("a normalisation is missing or wrong", "a normalisation layer in each block"),
    "nonfinite": Cause(
        "a log, root or division of values that can be zero", "no log or division of values that can be zero; also check the inputs"
    ),
    "outliers": Cause(
        "a weight that is far too large",
        "find the weight that is far too large; weight decay, normalisation, or keeping these features in 16 bits",
    ),
    "wrong-axis": Cause(
        "a softmax, mean or concatenation along the wrong axis", "check the dim= of the operations before the layer"
    ),
    # data
    "labels-do-not-fit": Cause(
        "the labels do not belong to the inputs", "look at some inputs with their labels as the loss gets them; shuffle both alike"
    ),
    "labels-constant": Cause("all labels are equal", "look at the labels as the loss gets them"),
    "data-order": Cause("the data is sorted", "shuffle=True in the DataLoader"),
    "repeated-batches": Cause(
        "the same batch comes again and again", "a fresh batch in each step: next(iter(loader)) begins anew each time"
    ),
    "inputs-constant": Cause("all inputs are equal", "look at the inputs as the net gets them"),
    "inputs-not-normalised": Cause(
        "the inputs are not normalised", "subtract the mean of each feature, and divide by its standard deviation"
    ),
    "nonfinite-inputs": Cause("the data has NaN or infinity", "replace or leave out these samples"),
    "target-scale": Cause("the target is far from the scale of the outputs", "normalise the target"),
    "noise": Cause("the inputs say nothing of the target", "look at some inputs as the net gets them"),
    # state
    "eval-mode": Cause("the net is trained in evaluation mode", "net.train() before the training, and again after each evaluation"),
    "train-mode": Cause("the net is evaluated in training mode", "net.eval() before each evaluation"),
    "statistics-frozen": Cause("the running statistics of batch norms do not move", "the default momentum of 0.1"),
    "batch-of-one": Cause("a batch of one sample in training", "drop_last=True in the DataLoader"),
    "stale-optimizer": Cause(
        "the optimizer was made before parameters were replaced", "make the optimizer after the net is complete and moved"
    ),
    "weights-overwritten": Cause(
        "weights are written to between the steps", "look for load_state_dict, copy_ or a reset inside the loop"
    ),
    "optimizer-reset": Cause("the optimizer is made anew in each step", "make the optimizer once, before the loop"),
    "carried-state": Cause("a state is carried over between batches", "reset or detach the hidden state at each batch"),
    "not-reduced": Cause(
        "a rank does not reduce its gradients with the others",
        "look for steps or layers in which a rank leaves out the all-reduce, such as no_sync, or a net called past its wrapper",
    ),
    "ranks-start-apart": Cause(
        "ranks start from other weights, or each trains a net of its own",
        "the same seed or checkpoint on all ranks before the net is made, or DistributedDataParallel, which sends those of rank 0",
    ),
    "silent-corruption": Cause(
        "a device stored or computed a wrong bit",
        "run again from a checkpoint before this step: if the same rank differs again, test its memory and device, or leave it out",
    ),
    "changed-on-one-rank": Cause(
        "one rank changes parameters by itself",
        "look for load_state_dict, copy_ or a reset that one rank alone reaches, such as below if rank == 0",
    ),
    "shared-layers": Cause(
        "one layer stands in several places", "a layer for each place: [make() for _ in range(n)], where it said [layer] * n"
    ),
    "untied": Cause("weights that should be tied are not", "tie them again after the net is moved or loaded"),
}
"""By name, the causes that findings name."""

KINDS: dict[str, FindingKind] = {
    "nonfinite": FindingKind(
        "error",
        "One NaN or infinity makes all weights NaN at the next step.",
        ("rate-too-high", "nonfinite"),
        "a smaller learning rate, gradient clipping, no log or division of values that can be zero; also check the inputs",
    ),
    "never-ran": FindingKind(
        "error", "A layer that is not called does not contribute to the result and learns nothing.", ("never-ran",)
    ),
    "dead-units": FindingKind(
        "error", "Nothing passes through them and no gradient comes back, so they seldom recover.", ("dead-units", "initialisation")
    ),
    "saturated-units": FindingKind(
        "error", "There the curve is flat, so hardly any gradient passes.", ("saturation", "initialisation")
    ),
    "vanishing-gradients": FindingKind(
        "error",
        "Layers near the input learn little or nothing.",
        ("vanishing-gradients", "saturation", "initialisation"),
        "normalisation layers, residual connections, ReLU in place of saturating activations, initialisation by fan-in",
    ),
    "exploding-gradients": FindingKind(
        "error",
        "No learning rate suits both ends of the net: what suits one end is far too much for the other.",
        ("exploding-gradients", "initialisation"),
        "normalisation layers, smaller initial weights, gradient clipping",
    ),
    "outliers": FindingKind(
        "error",
        "They make numbers of few bits coarse, and one feature decides what the next layer sees.",
        ("outliers", "initialisation"),
    ),
    "frozen": FindingKind(
        "error",
        "The layer learns nothing.",
        ("not-in-optimizer", "frozen", "detached"),
        "give its parameters to the optimizer; if it is frozen on purpose, set requires_grad=False",
    ),
    "updates-too-large": FindingKind(
        "error",
        "The weights change at random rather than improve.",
        ("rate-too-high",),
        "a learning rate smaller by as much, or a warm-up",
    ),
    "updates-too-small": FindingKind(
        "error", "The layer hardly learns.", ("rate-too-low",), "a larger learning rate, for this layer at least"
    ),
    "no-gradient": FindingKind("error", "The layer learns nothing.", ("detached", "dead-units")),
    "gradient-cut": FindingKind(
        "warning", "A part of what its weights do is not learned from, unless that is meant.", ("detached",)
    ),
    "zero-weights": FindingKind(
        "error",
        "What is zero everywhere stays zero, and gives gradients of zero to the layers before.",
        ("initialisation", "symmetry"),
    ),
    "tiny-gradients": FindingKind("error", "Steps that follow the gradient are as tiny.", ("loss-scale", "rate-too-low")),
    "clipped": FindingKind("error", "All that the size of a gradient tells is lost, and steps are tiny.", ("clipping",)),
    "not-cleared": FindingKind("error", "Each step follows the sum of all gradients so far.", ("gradients-not-cleared",)),
    "rate-is-zero": FindingKind("error", "Nothing is learned at a learning rate of 0.", ("no-steps", "schedule")),
    "rate-ends-early": FindingKind("error", "What is left of the training learns nothing.", ("schedule",)),
    "ascends": FindingKind("error", "The training makes the net worse.", ("ascent",)),
    "written-between-steps": FindingKind(
        "warning", "What the optimizer learned is lost, and its own state fits no more.", ("weights-overwritten",)
    ),
    "optimizer-made-anew": FindingKind(
        "error", "Momentum and the scale of gradients begin at zero each time.", ("optimizer-reset",)
    ),
    "foreign-parameters": FindingKind("error", "What is stepped is not what is trained.", ("stale-optimizer", "not-in-optimizer")),
    "evaluation-mode": FindingKind(
        "warning",
        "Dropout does nothing, and batch norms neither normalise by the batch nor learn their statistics.",
        ("eval-mode",),
    ),
    "training-mode": FindingKind(
        "warning", "Dropout acts and batch norms depend on the batch, so scores are worse than the net is.", ("train-mode",)
    ),
    "coarse-weights": FindingKind(
        "error", "A number of 16 bits does not change if less than its last bit is added.", ("lost-updates",)
    ),
    "statistics-stand-still": FindingKind(
        "warning", "In evaluation, batch norms use statistics of the start.", ("statistics-frozen",)
    ),
    "large-epsilon": FindingKind("warning", "Adam then follows the plain gradient, at a much smaller step.", ("epsilon",)),
    "odd-momentum": FindingKind("warning", "Steps follow gradients of long ago, so that the weights oscillate.", ("momentum",)),
    "much-dropout": FindingKind("warning", "Little passes through.", ("dropout",)),
    "nonfinite-inputs": FindingKind("error", "They make the loss and all weights NaN.", ("nonfinite-inputs",)),
    "batches-of-one": FindingKind("error", "A batch norm takes the sample itself for the mean.", ("batch-of-one",)),
    "constant-inputs": FindingKind("error", "There is nothing to learn from.", ("inputs-constant",)),
    "large-inputs": FindingKind(
        "warning", "The first layer learns badly, and its units die or saturate.", ("inputs-not-normalised",)
    ),
    "weak-inputs": FindingKind(
        "warning", "What the layers after it see is mostly a constant.", ("inputs-not-normalised", "initialisation")
    ),
    "unreachable-target": FindingKind("error", "The loss cannot come near its minimum.", ("output-activation", "target-scale")),
    "repeated-batches": FindingKind("warning", "The net learns this batch by heart, and nothing else.", ("repeated-batches",)),
    "constant-target": FindingKind("error", "A constant is all that can be learned.", ("labels-constant",)),
    "sorted-target": FindingKind("warning", "The net unlearns with each batch what the one before taught.", ("data-order",)),
    "large-target": FindingKind("warning", "Outputs must grow far before the loss falls.", ("target-scale",)),
    "loss-does-not-fall": FindingKind(
        "error", "Nothing is learned.", ("labels-do-not-fit", "rate-too-high", "rate-too-low", "noise", "initialisation")
    ),
    "loss-rises": FindingKind("error", "The training makes the net worse.", ("rate-too-high", "ascent")),
    "loss-is-constant": FindingKind("error", "Nothing is learned.", ("no-steps", "detached", "not-in-optimizer")),
    "loss-falls-slowly": FindingKind("warning", "Most of what could be learned is not.", ("rate-too-low", "initialisation")),
    "loss-jumps": FindingKind("warning", "The training is thrown back again and again.", ("rate-too-high", "data-order")),
    "high-initial-loss": FindingKind(
        "warning", "The first steps only undo what the initial weights claim.", ("initialisation", "inputs-not-normalised")
    ),
    "probabilities-as-logits": FindingKind(
        "error", "The loss cannot come near its minimum, and gradients vanish.", ("output-activation",)
    ),
    "equal-units": FindingKind("error", "All units learn the same, so one would do.", ("symmetry", "initialisation")),
    "equal-outputs": FindingKind(
        "error", "What the net says does not depend on its inputs.", ("dead-units", "initialisation", "inputs-constant")
    ),
    "shrinking-weights": FindingKind("error", "What is learned is forgotten at once.", ("weight-decay",)),
    "growing-signal": FindingKind("warning", "Layers far from the input see enormous values.", ("initialisation", "normalisation")),
    "frozen-from-start": FindingKind(
        "warning",
        "They are random numbers: nobody has trained these layers.",
        ("frozen",),
        "load the trained weights before freezing, or train these layers, too: requires_grad=True",
    ),
    "wrong-normalisation": FindingKind(
        "error",
        "What it gives says little of what comes in, or has not the mean of 0 and the spread of 1 that later layers expect.",
        ("normalisation", "wrong-axis"),
    ),
    "shrinking-signal": FindingKind(
        "error",
        "What the layers after it see is a constant, and gradients shrink as much on their way back.",
        ("vanishing-gradients", "initialisation", "normalisation"),
    ),
    "bottleneck": FindingKind("warning", "All that later layers see passes through one number.", ("bottleneck",)),
    "large-initial-weights": FindingKind(
        "warning", "Signals and gradients grow with each such layer, and units saturate.", ("initialisation", "saturation")
    ),
    "large-initial-bias": FindingKind(
        "error", "Its units are all on, or all off, whatever comes in.", ("initialisation", "saturation")
    ),
    "gradients-discarded": FindingKind(
        "error", "What most batches taught is thrown away.", ("no-steps",), "call optimizer.step() before each zero_grad()"
    ),
    "wrong-probabilities": FindingKind(
        "warning",
        "A net that is trained for the labels as they are says on average how often each comes.",
        ("wrong-loss", "labels-do-not-fit"),
    ),
    "strong-weight-decay": FindingKind(
        "warning", "What is learned is forgotten at once: the weights follow the decay, not the loss.", ("weight-decay",)
    ),
    "loss-climbs": FindingKind("error", "The training makes the net worse.", ("ascent", "rate-too-high")),
    "shapes-broadcast": FindingKind("error", "The best that the net can learn is the mean of the target.", ("broadcast",)),
    "rectified-outputs": FindingKind(
        "warning", "No class can be ruled out, and where all logits are 0 no gradient comes back.", ("output-activation",)
    ),
    "exclusive-labels": FindingKind(
        "error",
        "cross_entropy takes the labels for shares of one: a class can only gain what others lose.",
        ("wrong-loss",),
        "binary_cross_entropy_with_logits, if each label may be 1 or 0 by itself",
    ),
    "linear-net": FindingKind(
        "warning", "Layers without an activation function between them are one linear layer.", ("no-nonlinearity",)
    ),
    "samples-mix": FindingKind("error", "What the net says of a sample depends on which others are in its batch.", ("wrong-axis",)),
    "sees-the-future": FindingKind(
        "error", "The net reads what it ought to predict, and will not have it in use.", ("mask", "wrong-axis")
    ),
    "sees-only-the-past": FindingKind("warning", "What comes later would tell more, and is not read.", ("mask",)),
    "targets-are-inputs": FindingKind(
        "error",
        "The net learns to repeat what it is given.",
        ("labels-do-not-fit",),
        "a target that is one token ahead of the inputs",
    ),
    "ignores-inputs": FindingKind(
        "error",
        "What is not read cannot be learned from.",
        ("bottleneck", "wrong-axis", "never-ran"),
        "look at what the layer reads: an index or a slice that takes too little, or the wrong axis",
    ),
    "mask-inverted": FindingKind("error", "All that matters is left out.", ("mask",)),
    "order-has-no-effect": FindingKind(
        "warning",
        "Attention alone takes its inputs for a set.",
        ("never-ran",),
        "add position embeddings to what the first attention reads, unless the inputs are a set",
    ),
    "attention-saturated": FindingKind(
        "error",
        "No gradient reaches the scores, so it cannot learn what to read.",
        ("attention-scale", "initialisation", "rate-too-high"),
    ),
    "attention-uniform": FindingKind("warning", "It is a mean, whatever is asked.", ("attention-scale", "initialisation")),
    "attention-unscaled": FindingKind(
        "warning", "Scores that grow with the width of the head make each query read one key.", ("attention-scale",)
    ),
    "repeated-layer": FindingKind(
        "warning", "The places share their weights, so the net has fewer parameters than it seems to.", ("shared-layers",)
    ),
    "one-direction": FindingKind(
        "warning", "All that the layer says of a sample is one number.", ("bottleneck", "symmetry", "initialisation")
    ),
    "dropout-on-outputs": FindingKind(
        "warning", "The loss sees outputs that the net did not mean, and pulls the others up for them.", ("dropout",)
    ),
    "softmax-axis": FindingKind("error", "The shares of what does not compete sum to one.", ("wrong-axis", "output-activation")),
    "activations-in-a-row": FindingKind(
        "warning", "Half of what the second could give never comes.", ("output-activation", "dead-units")
    ),
    "outputs-reshaped": FindingKind(
        "error",
        "Numbers of different positions are taken for the logits of one.",
        ("wrong-axis",),
        "transpose or permute, not view",
    ),
    "targets-displaced": FindingKind(
        "error",
        "The net learns to predict another position than it is used for.",
        ("labels-do-not-fit",),
        "labels that are shifted once: by the data or by the loss, not by both",
    ),
    "class-ignored": FindingKind(
        "warning",
        "The loss does not ask for this class, or hardly.",
        ("wrong-loss", "labels-do-not-fit"),
        "a look at ignore_index, at masks and at the weights of classes in the loss",
    ),
    "unused-classes": FindingKind(
        "warning",
        "The net has outputs for classes that never come, so labels or the number of classes are wrong.",
        ("labels-do-not-fit", "target-scale"),
        "a look at the labels of a few samples, after all preprocessing",
    ),
    "normalised-outputs": FindingKind("warning", "The net cannot return what the target is.", ("normalisation",)),
    "oscillating-weights": FindingKind("warning", "Steps jump over the minimum and back.", ("rate-too-high", "momentum")),
    "untied-weights": FindingKind("warning", "The net has weights that it was to share, and they drift apart.", ("untied",)),
    "random-in-evaluation": FindingKind(
        "warning", "Scores and predictions are noisy, and worse than the net is.", ("dropout", "train-mode")
    ),
    "carries-state": FindingKind("warning", "What the net says of a batch depends on the batches before.", ("carried-state",)),
    "replicas-differ": FindingKind(
        "error",
        "The ranks train different nets, and what is saved is that of one of them.",
        ("not-reduced", "silent-corruption", "changed-on-one-rank", "ranks-start-apart"),
    ),
    "left-range": FindingKind(
        "warning",
        "Good runs of this training never were there.",
        (),
        "look at what was changed since the good runs, at the first step and layer named",
    ),
}
"""By name, the kinds of findings."""
