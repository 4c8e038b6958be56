"""Other systems' own formats, each with its own definition outside WIRE.md: values in, what comes back out, no bytes.

`table` names them without a tensor library; a module per system holds its arithmetic; `round_trip` is the way in. How
each system sums, and which rank keeps what, is `fc_eval.collective.peer_rules`.
"""
