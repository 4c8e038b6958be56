"""Data that come with the package, so that a first run needs no download."""
