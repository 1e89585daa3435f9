"""The HTTP package serves the API, the dashboard and the operator endpoints of the controller."""
