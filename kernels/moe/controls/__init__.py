"""Arms that a card needs and no router takes: controls, and levers that change one thing of another kernel."""
