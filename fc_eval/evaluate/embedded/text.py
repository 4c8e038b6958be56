"""The embedded English text: Python's own language reference, as `help()` shows it.

It comes with every Python (module `pydoc_data.topics`, under the PSF licence) and differs between Python versions, so
a record keeps its hash, and numbers of two versions are not compared.
"""

from pydoc_data.topics import topics


def embedded_text() -> str:
    """All topics joined with two newlines, in the order of their sorted names."""
    return "\n\n".join(topics[name] for name in sorted(topics))
