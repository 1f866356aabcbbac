"""A package, because operators have tests of the same name beside it."""
