"""Pagewire, through its service, beside the engines that a user would take instead, on one machine (`make compare`)."""
