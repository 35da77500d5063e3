"""Loops in C++ for CPU tensors, built with the package if there is a compiler."""
