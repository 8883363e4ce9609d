"""What the rest stands on: XLA, compiled programs, devices, files, command lines."""
