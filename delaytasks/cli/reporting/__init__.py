"""The parts of `delaytasks report`: its data, its charts and its page."""
