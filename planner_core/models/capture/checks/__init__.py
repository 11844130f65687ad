"""What a plan can hold: what is refused at a call, what a whole pass may leave behind, and what is said of an error."""
