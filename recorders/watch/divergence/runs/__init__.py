"""Where two recorded runs part: the first step, phase and layer."""
