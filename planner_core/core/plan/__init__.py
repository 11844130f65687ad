"""The plan: plain data. The search, the baselines and edits by hand write it; explorer, export and verification read it.

For every operator call of the model (its *call site*) a plan says with which placements each operand is taken and each result is
delivered. For every parameter it says how it is stored. To apply a plan decides nothing.

    operand:  delivered state --edge--> state in which the op takes it     (slice, pad, divide; rarely a gather)
    result:   state in which the op makes it --edge--> delivered state     (all_reduce, all_gather, ...)
    weight:   stored state --edge--> state in which the op takes it        (ZeRO-3 gathers and scatters here)

An edge has steps in both directions, each on one mesh axis. Forward steps act on the tensor, backward steps on its gradient, in the
order in which they are listed.
"""
