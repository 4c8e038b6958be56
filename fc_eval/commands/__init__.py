"""The commands of `fc-eval`, a file each; those of `bench` and `predict` stand in their rooms."""
