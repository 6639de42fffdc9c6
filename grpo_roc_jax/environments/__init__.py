"""What answers the policy: an environment of the user's for each rollout, in threads, processes or Ray actors."""
