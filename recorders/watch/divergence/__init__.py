"""Where two nets, or two runs of one step, part: the first module and the first operator."""
