"""Templates of exported Python files: functions whose text is copied into them."""
