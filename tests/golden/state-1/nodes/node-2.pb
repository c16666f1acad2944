
node-2-start-33
node-2node-2:7000"€€€€"€€€€"news(2
user 2item 