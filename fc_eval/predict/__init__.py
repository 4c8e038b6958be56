"""What a time to first token costs by count: predicted from a model's shape, a machine's rates and a comm's traffic."""
