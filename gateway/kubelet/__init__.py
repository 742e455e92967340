"""What is known of the kubelet: where it is, what it speaks, and what its records say."""
