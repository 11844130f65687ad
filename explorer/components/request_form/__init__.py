"""What is asked for: the sentence at the top of every page, and the fields that its parts open."""
