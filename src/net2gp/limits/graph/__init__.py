"""From a module to its operations, and the values that stand for them during a translation.

A module and the shapes of its inputs go into `trace`, and a `torch.fx` graph with shapes comes out.
`translate` holds what each node of that graph becomes (data, a signal, a parameter, attention logits)
and the state of a translation, `function_registry` the table of rules for functions by name, and
`probing` finds out what an unknown operation does by running it.
"""
