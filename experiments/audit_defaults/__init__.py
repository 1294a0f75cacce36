"""Study behind the default score and damping of label audits."""
