"""What is measured: perplexity, divergence from a baseline, lm-eval tasks. Knows nothing of communication.

Import from the modules: `spec` and `data` need no tensor library.
"""
