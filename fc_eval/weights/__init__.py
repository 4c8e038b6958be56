"""INT8 weights and activations (W8A8): their arithmetic, the layer that has them, and the smoothing before it."""
