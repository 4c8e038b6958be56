"""Where a model comes from, and how it is loaded. `config` needs no tensor library; `load` does."""
