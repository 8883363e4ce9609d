"""The report: what it is made of, its pictures, its page."""
