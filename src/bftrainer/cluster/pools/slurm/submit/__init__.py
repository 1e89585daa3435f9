"""The submission of pilots: as the controller's own account, as other accounts, or by lenders of users."""
