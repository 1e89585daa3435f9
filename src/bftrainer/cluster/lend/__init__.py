"""The lender: a user's small daemon that submits and cancels pilots as this user, when the controller asks for it."""
