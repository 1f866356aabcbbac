"""Adapters to training libraries. Each module imports its library. `import monoidreduce` imports none."""
