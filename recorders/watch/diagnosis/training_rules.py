"""Rules on the training as a whole: its loss, its steps, its inputs and its target."""

RULES = ()
