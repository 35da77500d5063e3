"""Recorders in trainings that other libraries run. Each module imports its library; import the module that you need."""
