"""How data gets from workers to the caller and back: the slab, the mail, the message channel."""
