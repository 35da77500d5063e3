"""A loop in C++ for CPU tensors, compiled when it is first needed if there is a compiler."""
