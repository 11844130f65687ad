"""Record a forward pass, call by call: the order in which a call is judged, the tree of module calls, and what listeners learn."""
