"""One visitor's state: address, plans, progress."""
