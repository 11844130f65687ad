"""Python source that exported files are made of: functions whose text is copied into them, and modules joined into one."""
