"""What people open after a run: the HTML page, its plots and the model card."""
