"""One rule per layer and per function: from the signals that an operation gets to the one that it makes.

A translation, a node of the graph and the node's arguments go in; a `Signal` with new expressions comes
out, or `UnsupportedLayer` says why there is none. Rules for modules are registered with `rule` of
`layer_rules`, and rules for functions and tensor methods with `function_rule`; importing the files
registers them, which `plan` does.
"""
