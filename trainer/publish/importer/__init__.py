"""Making a snapshot of a model that exists already: its tables, and its dense net."""
