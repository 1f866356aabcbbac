"""Monoids that users write in C++: their text, their kernels and the check of their laws."""
