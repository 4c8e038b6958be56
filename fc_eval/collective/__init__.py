"""Who sends what, and in which order sums happen. Import from the modules: `comm` needs no tensor library."""
