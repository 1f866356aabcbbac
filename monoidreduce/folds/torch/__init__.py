"""Programs run by torch: the reference, some columns at a time, and as a `Monoid`."""
