"""A view of runs from outside: looks at their workers, what keeps them, and a timeline. The runs do nothing for it."""
