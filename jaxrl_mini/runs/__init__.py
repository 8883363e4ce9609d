"""What is kept of a run and read back: records, recordings, policies; and whether they hold."""
