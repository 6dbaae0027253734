"""The databases of a deployment, and the router that sends each call to its database."""
