"""What ships in the box, registered through the same entry points as anyone's."""
