"""Adapters to training libraries.

The modules for transformers and TRL import those libraries, so `import monoidreduce` imports no adapter.
"""
