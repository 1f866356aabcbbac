"""Adapters to training libraries. The modules for transformers and for TRL import these.

`import monoidreduce` imports none of them.
"""
