"""Products of sorted tokens with the weights of their experts."""
