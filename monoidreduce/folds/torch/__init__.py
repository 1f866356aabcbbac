"""Programs evaluated by torch: as reference, in chunks of columns, and as a `Monoid`."""
