"""The task in readable Python, its transition tables, its histories."""
